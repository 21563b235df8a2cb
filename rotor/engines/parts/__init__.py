"""Parts: captured pieces or sharded blocks of a model, chosen together."""
