"""Synthetic models of real ones' sizes, written as model folders, to measure and to test with."""
