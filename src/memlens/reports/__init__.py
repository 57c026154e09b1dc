"""`memlens report`: an index as one self-contained page that a person can read and share.

    make_report(index, Path("report.html"), assets=Path("figures"))

The name is imported when first used: others need this package's words and colours alone, without torch.
"""
