"""The `transformers` model, built without weights, changed by converters, and bound to what lies in buffers. Stands on ``store``."""
