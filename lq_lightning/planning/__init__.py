"""Plan a run before any GPU is rented: memory, time, bytes and loss, from a simulated step."""
