"""What both wings use and no plan holds: errors, units of measure, interrupts, threads, bars, output."""
