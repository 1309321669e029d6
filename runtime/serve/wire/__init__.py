"""What front and motor say to each other, over one local socket. Imports no torch."""
