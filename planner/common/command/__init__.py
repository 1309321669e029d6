"""The command line: Hydra, the configuration's schema, and how what a user wrote becomes the types that all else uses."""
