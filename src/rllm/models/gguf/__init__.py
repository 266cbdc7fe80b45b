"""Models in GGUF, the format of llama.cpp and Ollama, read as model directories."""
