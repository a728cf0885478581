"""Real inference servers beside the simulator: started, calibrated and compared with it."""
