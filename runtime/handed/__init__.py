"""Steps that are launched kernel by kernel, and hand units over to the CPU: those of several ranks, and those that read the SSD."""
