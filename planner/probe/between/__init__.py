"""The network between two hosts: a server on one of them, started by hand, and what the other one times."""
