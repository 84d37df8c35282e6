"""The web page of `penstock dash`: a small server for one user, and the files it shows.

In:  recorded runs and the sockets of running ones.
Out: a page, JSON, a stream of events, Prometheus text, over HTTP.
Runs in: command line. Does not import torch.

    access       who may ask for what: Host, token, Origin; the headers of every answer
    answers      runs, points and settings as plain values, read from the records
    events       the stream: what is new, every second
    aside        threads for what blocks
    connections  hung up on when nobody asks for anything through them
    server       routes, and the server itself
    files        what of static/ is served
    static/      the page
"""
