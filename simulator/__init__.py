"""An event clock and simulated workers around the scheduler core that serves (design, idea 1)."""
