"""Products in C and the threads that do them, compiled when the package is installed."""
