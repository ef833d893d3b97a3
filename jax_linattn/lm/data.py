"""Text to characters to tokens: the corpus and its vocabulary."""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

VALIDATION_FRACTION = 0.1


# --- text -------------------------------------------------------------------------------------------------------------


def read_corpus(path: str | None = None) -> str:
    """The text to learn.

    Args:
      path: a text file, or a folder, of which all files are read in sorted order; None or "" = the Python language
        reference that CPython carries (`pydoc_data.topics`), its topics joined in sorted order.

    Returns:
      The text; UTF-8, line ends as "\\n".

    Raises:
      ValueError: if there is no such path, a file is no UTF-8 text, or there is nothing in it.
    """
    if not path:
        return _language_reference()
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"corpus {path!r} does not exist; give a text file or a folder of them, --config.corpus=PATH")
    files = sorted(p for p in root.rglob("*") if p.is_file() and not _is_hidden(p, root)) if root.is_dir() else [root]
    text = "\n".join(_read_text(file) for file in files)
    if not text.strip():
        raise ValueError(f"corpus {path!r} holds no text ({len(files)} file(s) read); give one with some")
    return text


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus file {str(path)!r} is not UTF-8 text ({error}); remove or convert it") from error
    if "\0" in text:
        raise ValueError(f"corpus file {str(path)!r} is binary: it holds zero bytes; give text")
    return text.replace("\r\n", "\n")


def _language_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python comes without pydoc_data.topics, the default corpus; give a text with --config.corpus=PATH"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


# --- characters -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The characters that a model knows; a token is a character's place among them."""

    characters: str

    @classmethod
    def of(cls, text: str) -> "Vocabulary":
        return cls("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Tokens, int32 [length].

        Raises:
          ValueError: naming the characters that the vocabulary lacks.
        """
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)
        tokens = np.minimum(np.searchsorted(known, code_points), self.size - 1)
        if not np.array_equal(known[tokens], code_points):
            unknown = "".join(sorted(set(text) - set(self.characters)))
            raise ValueError(f"text holds characters that the vocabulary lacks: {unknown!r}; it knows {self.characters!r}")
        return tokens.astype(np.int32)

    def decode(self, tokens) -> str:
        return "".join(self.characters[token] for token in np.asarray(tokens))


class Corpus(NamedTuple):
    """Tokens to learn from and tokens to judge by, which follow them in the text."""

    vocabulary: Vocabulary
    train: np.ndarray  # int32 [n]
    validation: np.ndarray  # int32 [m]

    def fingerprint(self) -> str:
        """The same for the same text alone."""
        digest = hashlib.sha256(self.vocabulary.characters.encode())
        for tokens in (self.train, self.validation):
            digest.update(tokens.tobytes())
        return digest.hexdigest()


def load_corpus(path: str | None, context: int) -> Corpus:
    """The first 90 % of the text's characters to train on, the rest to validate on.

    Args:
      path: as `read_corpus` takes it.
      context: T, the tokens of a training sequence, for which both parts must be long enough.

    Raises:
      ValueError: as `read_corpus`, or if the text is too short.
    """
    text = read_corpus(path)
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    split = len(tokens) - int(len(tokens) * VALIDATION_FRACTION)
    corpus = Corpus(vocabulary, tokens[:split], tokens[split:])
    if len(corpus.train) <= context or len(corpus.validation) < 2:
        raise ValueError(
            f"corpus {path or 'pydoc_data.topics'!r} has {len(tokens)} characters, too few for sequences of {context}: "
            f"give more text or a shorter context"
        )
    return corpus
