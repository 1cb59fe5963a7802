"""Who can be in the demo."""

from django.contrib.auth import get_user_model

PEOPLE = ("alice", "bob", "carol")
PASSWORD = "demo"
ADMIN = "admin"  # the name, and the password


def create() -> list[int]:
    """Add who is missing, since passwords are slow to make; return the ids of all."""
    users = get_user_model().objects
    known = set(users.values_list("username", flat=True))

    for name in PEOPLE:
        if name not in known:
            users.create_user(name, password=PASSWORD)
    if ADMIN not in known:
        users.create_superuser(ADMIN, password=ADMIN)

    return [*users.values_list("pk", flat=True)]
