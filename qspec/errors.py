"""The exception tree: small, and drawn here whole.

    QspecError                 anything qspec refuses or gives up on
    ├── RecipeError            the recipe asks for something that cannot be done
    ├── SourceError            a model, tokenizer or data set is missing or unsupported
    ├── PairError              target and draft do not fit together
    ├── IntegrityError         a file of a pair is not what its manifest says
    ├── OutputError            an output folder cannot be written
    └── OutOfMemory            a job does not fit in the memory that this process may take

Every message names the *value*, the *rule* it breaks and the *fix*; the command line prints it as one line, or as many
as there are problems, and exits with status 2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class QspecError(Exception):
    """Base of everything a caller may want to catch.

    `value` is what was given, `rule` what it breaks, `fix` what to do instead; the message joins the three in one line.
    `more`: further problems of the same input, each of which has a line of its own behind it.
    """

    def __init__(self, value: str, rule: str, fix: str, more: Sequence["QspecError"] = ()) -> None:
        self.value, self.rule, self.fix, self.more = value, rule, fix, tuple(more)
        self.line = " ".join(f"{value}: {rule}; {fix}".split())
        super().__init__("\n".join(dict.fromkeys([self.line, *(error.line for error in more)])))


class Problems:
    """Errors that are kept while their job goes on, and raised together."""

    def __init__(self, errors: Sequence[QspecError] = ()) -> None:
        self.errors = list(errors)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the error that a block raises."""
        try:
            yield
        except QspecError as error:
            self.errors += [error, *error.more]

    def tell(self) -> None:
        """Raise what was kept as one error, of the first one's kind."""
        if self.errors:
            first, *others = self.errors
            raise type(first)(first.value, first.rule, first.fix, others) from first


class RecipeError(QspecError):
    """The recipe asks for something that cannot be done."""


class SourceError(QspecError):
    """A model, tokenizer or data set is missing or unsupported."""


class PairError(QspecError):
    """Target and draft do not fit together."""


class IntegrityError(QspecError):
    """A file of a pair is not what its manifest says."""


class OutputError(QspecError):
    """An output folder cannot be written."""


class OutOfMemory(QspecError):
    """A job does not fit in the memory that this process may take."""
