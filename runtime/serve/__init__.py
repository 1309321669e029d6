"""An endpoint that many ask at once: a front process that speaks HTTP, and a motor process that computes."""
