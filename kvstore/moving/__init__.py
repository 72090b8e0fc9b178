"""Between what core/ decides for the SSD and the workers of tiers/ssd that do it: one mover, in the daemon's loop."""
