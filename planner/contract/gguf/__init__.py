"""GGUF files of llama.cpp's world as checkpoints: their headers, configs and names, without torch."""
