"""The probe's time, and what else the machine does meanwhile."""
