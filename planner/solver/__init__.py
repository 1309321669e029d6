"""The integer program: its menus, its constraints, its answer, and why there is none."""
