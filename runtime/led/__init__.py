"""The process of a rank that another one leads."""
