"""Split learning: a client fine-tunes adapters of a model whose frozen trunk a server holds."""
