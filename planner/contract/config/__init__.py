"""The words of configuration files as the contract's types, and back."""
