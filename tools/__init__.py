"""Command line of usp: train, convert, quickstart."""

if __name__ != "usp.tools":
    raise ImportError(
        f"the package is named usp.tools, got a bare import of {__name__!r}. Write: import usp.tools"
    )
