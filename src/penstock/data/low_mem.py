"""Pairs of prompt and response from Parquet files, for fine-tuning on a machine with little memory.

In:  Parquet files with a column of prompts and a column of responses.
Out: pairs of texts, each cut to a length and followed by an end text; with a tokenizer, also batches of token ids.
Runs in: trainer and worker.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.data.parquet.dataset import ParquetDataset
from penstock.errors import ConfigError, DataError


class LowMemDataset(ParquetDataset):
    """Each sample is ``(prompt, response)``; both texts are cut to ``max_seq_len`` characters and followed by ``end``.

    With ``ultra_low_mem`` the dataset keeps no rows between reads; with ``keep_in_memory`` it reads all rows once, into
    memory that all workers share. ``tokenizer_dir`` is a folder in which a tokenizer of transformers was saved, or a
    name on a hub with its owner, such as ``google-t5/t5-base``; with it, ``collate_fn`` makes batches of token ids.
    """

    def __init__(
        self,
        parquet_file: str | os.PathLike[str] | Sequence[Any],
        tokenizer_dir: str | os.PathLike[str] | None = None,
        ultra_low_mem: bool = False,
        *,
        keep_in_memory: bool = False,
        max_seq_len: int = 512,
        end: str = "[EOS]",
        prompt: str = "prompt",
        response: str = "response",
        keep: object = "32MiB",
    ) -> None:
        if ultra_low_mem and keep_in_memory:
            raise ConfigError(
                "ultra_low_mem=True keeps no rows and keep_in_memory=True keeps all rows: pass only one of them"
            )
        if tokenizer_dir is not None:
            _check_tokenizer(tokenizer_dir)
        mode = "ultra" if ultra_low_mem else "memory" if keep_in_memory else "mapped"
        super().__init__(parquet_file, [prompt, response], None, mode, keep=keep)
        self.tokenizer_dir = tokenizer_dir
        self.max_seq_len = max_seq_len
        self._end = end
        self._columns = prompt, response
        self._tokenizer = _Tokenizer()

    def collate_fn(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Token ids of prompts (``input_ids``, ``attention_mask``) and of responses (``labels``). Prompts are padded to
        the longest prompt, responses to the longest response; ``labels`` are padded with -100, which losses ignore."""
        prompts, responses = (list(texts) for texts in zip(*pairs, strict=True))
        inputs = self._tokens(prompts)
        targets = self._tokens(responses)
        labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
        return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}

    def made_of(self) -> tuple[Any, ...]:
        return self._files, self.max_seq_len, self._end, self.transform

    def _sample_of(self, row: dict[str, Any]) -> Any:
        # transform= is not used for this, because a bound method would make every copy of this object refer to the
        # original.
        of_prompt, of_response = self._columns
        prompt, response = row[of_prompt], row[of_response]
        if not (isinstance(prompt, str) and isinstance(response, str)):
            wrong = of_response if isinstance(prompt, str) else of_prompt
            raise DataError(f"the value of column {wrong} is not a text in this row: {row!r:.200}")
        length, end = self.max_seq_len, self._end
        pair: Any = prompt[:length] + end, response[:length] + end
        return pair if self.transform is None else self.transform(pair)

    def _tokens(self, texts: list[str]) -> Any:
        if self.tokenizer_dir is None:
            raise ConfigError("collate_fn needs a tokenizer: pass tokenizer_dir=")
        return self._tokenizer.of(self.tokenizer_dir)(
            texts, padding=True, return_tensors="pt", return_token_type_ids=False
        )


def _check_tokenizer(where: str | os.PathLike[str]) -> None:
    """Raise ConfigError for mistakes that would otherwise appear only in a worker, at the first batch."""
    name = os.fspath(where)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"tokenizer_dir={name!r} needs transformers: pip install transformers, or leave tokenizer_dir "
            "out and give the loader a collate_fn of your own"
        )
    if not Path(name).is_dir() and _HUB_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"tokenizer_dir={name!r} is neither a folder that tokenizer.save_pretrained() wrote nor a name on a hub, "
            "such as google-t5/t5-base"
        )


_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class _Tokenizer:
    """Each process loads the tokenizer on first use."""

    def __init__(self) -> None:
        self._loaded: Any = None

    def of(self, folder: str | os.PathLike[str]) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer  # type: ignore[import-not-found]

            self._loaded = AutoTokenizer.from_pretrained(os.fspath(folder))
        return self._loaded

    def __reduce__(self) -> Any:
        return _Tokenizer, ()
