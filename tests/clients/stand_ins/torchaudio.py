"""Empty: LLaMA-Factory imports torchaudio, whose wheel is built for CUDA, and uses it for audio only."""
