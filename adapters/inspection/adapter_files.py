"""The two files of an uploaded adapter, in the form in which the server passes them on.

Owns how they are held: the small configuration in memory, and the weights in an open file, because they may have 256 MB.
Never reads the weights into memory, and never closes the file: its owner does.
"""

import os
from dataclasses import dataclass
from typing import BinaryIO, Self

from graftwork.adapters.format.gguf_file import GGUF_MAGIC
from graftwork.adapters.format.lora_config import MAX_CONFIG_BYTES
from graftwork.platform.errors import ValidationFailed


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of `adapter_config.json`, and the open file `adapter_model.safetensors`; or a GGUF file with an empty
    configuration.
    """

    config: bytes
    weights: BinaryIO
    """A file of the operating system. Its content must not change while it is used."""

    @classmethod
    def read(cls, config: BinaryIO, weights: BinaryIO) -> Self:
        """Reads the configuration, and leaves the weights in their file. Blocks its thread.

        Raises ValidationFailed if the configuration is longer than MAX_CONFIG_BYTES.
        """
        content = config.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            message = f"config: the file is longer than {MAX_CONFIG_BYTES} bytes: send PEFT's adapter_config.json."
            raise ValidationFailed(message, param="config")
        files = cls(content, weights)
        files.weights.flush()
        return files

    def is_gguf(self) -> bool:
        """Whether the weights are a GGUF file, by their first bytes. Blocks its thread."""
        return os.pread(self.weights.fileno(), len(GGUF_MAGIC), 0) == GGUF_MAGIC

    @property
    def weights_bytes(self) -> int:
        """The length of the weights file."""
        return os.fstat(self.weights.fileno()).st_size
