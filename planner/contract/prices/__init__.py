"""What a plan costs: bytes of each tier, seconds of each stage, from scratch and without side effects."""
