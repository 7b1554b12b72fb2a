"""One optimizer step on quantized states: decode -> update -> encode, one pass over memory."""
