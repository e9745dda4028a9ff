"""What this computer has: hardware, drivers, optional packages. No torch."""
