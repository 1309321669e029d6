"""What a piece of a plan costs: bytes of each tier, seconds of each resource, from scratch and without side effects."""
