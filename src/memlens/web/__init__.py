"""The workbench: an index in the browser, served on this machine.

    app            create_app(Workbench(index)) returns a FastAPI application, and serve() runs it
    workbench      the state that pages share: the open index with its tables in memory, the model, a second index
    security       middleware: hosts, token, cross-site requests, body size, response headers
    rendering      templates, JSON, static files, and the queue for the model
    memory_map     statistics of all memories, the table of layers, the map
    pages/         the pages, and their JSON under /api/
    static_site    the same pages as files, for readers without a server

Importing this package is cheap and does not import torch.
"""
