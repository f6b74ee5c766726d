"""What the arguments of a linear cross entropy must be: torch's rules for torch's, and sentences for the others."""
