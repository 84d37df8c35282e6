"""The web page of `penstock dash`: a small server for one user, and the page it serves.

In:  recorded runs and the control sockets of running ones.
Out: a page, JSON, a stream of events, Prometheus text, over HTTP.
Runs in: command line. Does not import torch.
"""
