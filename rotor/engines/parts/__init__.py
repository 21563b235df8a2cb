"""Parts engines: captured pieces or sharded blocks of a model, planned together."""
