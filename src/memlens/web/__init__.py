"""The workbench: an index in the browser, one page per question, served by this machine to itself.

    app            create_app(Workbench(index)): a FastAPI application; serve() runs it
    workbench      the state that pages share: the index, the model, a second index
    served_index   an index that stays open, with its tables in memory
    security       access: hosts, tokens, origins, headers
    rendering      templates, JSON, static files
    static_site    the same pages as files, for a reader without a server
    pages/         one module per page: its HTML, and its JSON under /api/

Importing this package is cheap and needs no torch.
"""
