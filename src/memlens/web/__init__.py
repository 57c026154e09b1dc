"""The workbench: an index in the browser, one page a question, served by this machine to itself.

    create_app(Workbench(index))      a FastAPI application

    workbench   what the pages share: the index, the model that loads meanwhile, a second index
    app         the pages put together; what becomes of errors
    security    who may ask, and what a page may do
    rendering   templates, and text that may be shown
    pages/      one module a page: its HTML, and its JSON under /api/

Importing this package is cheap and needs no torch.
"""
