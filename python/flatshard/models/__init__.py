"""The native path: Llama-family models, their data, and the trainer."""

from .config import SIZES, LlamaConfig, load_config
from .llama import Llama, Loss

__all__ = ["Llama", "LlamaConfig", "Loss", "SIZES", "load_config"]
