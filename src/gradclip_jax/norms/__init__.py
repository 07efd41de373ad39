"""This package computes norms of trees, leaves and groups of leaves."""
