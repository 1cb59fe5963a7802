from django.contrib import admin
from django.contrib.auth import get_user_model
from django.contrib.auth.admin import UserAdmin

from rlaas_django.admin import RateLimitsOfUser

admin.site.unregister(get_user_model())


@admin.register(get_user_model())
class DemoUserAdmin(RateLimitsOfUser, UserAdmin):
    """Users with their rate limits."""
