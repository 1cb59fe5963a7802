"""Who can be in the demo."""

from django.contrib.auth import get_user_model

PEOPLE = ("alice", "bob", "carol")
PASSWORD = "demo"
ADMIN = "admin"  # the name, and the password


def create() -> None:
    """Add who is missing. Passwords are slow to make, by design, so the others are left alone."""
    users = get_user_model().objects
    known = set(users.values_list("username", flat=True))
    for name in PEOPLE:
        if name not in known:
            users.create_user(name, password=PASSWORD)
    if ADMIN not in known:
        users.create_superuser(ADMIN, password=ADMIN)
