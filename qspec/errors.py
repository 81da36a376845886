"""The exception tree: small, and drawn here whole.

    QspecError                 anything qspec refuses or gives up on
    ├── RecipeError            the recipe asks for something that cannot be done
    ├── SourceError            a model, tokenizer or data set is missing or unsupported
    ├── PairError              target and draft do not fit together
    ├── IntegrityError         a file of a pair is not what its manifest says
    ├── OutputError            an output folder cannot be written
    └── OutOfMemory            a job does not fit in the memory that this process may take

Every message names the *value*, the *rule* it breaks and the *fix*; the command line prints it as one line and
exits with status 2.
"""


class QspecError(Exception):
    """Base of everything a caller may want to catch.

    `value` is what was given, `rule` what it breaks, `fix` what to do instead; the message joins the three.
    """

    def __init__(self, value: str, rule: str, fix: str) -> None:
        self.value, self.rule, self.fix = value, rule, fix
        super().__init__(f"{value}: {rule}; {fix}")


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
