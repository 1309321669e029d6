"""The integer program itself: what it is about, its menus, and its constraints, each kind of them in a module."""
