"""Shared slots: allocation and admission in bytes, the codec between nested batches and slots, leases."""
