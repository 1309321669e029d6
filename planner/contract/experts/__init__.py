"""Routed experts: how often slots find them, what that costs, what a tier holds, and recorded routings."""
