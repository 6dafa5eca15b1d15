"""What would be silently wrong on shards, or wait for ever: found, and refused or said."""
