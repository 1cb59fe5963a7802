"""The same limits in Django REST framework and in django-ninja.

The start page quotes them from this file.
"""

from ninja import NinjaAPI
from rest_framework.response import Response
from rest_framework.views import APIView

from rlaas_django.integrations import drf, ninja


class DemoThrottle(drf.UserRateThrottle):
    scope = "demo"
    rate = "5/min"


class rest_framework(APIView):  # noqa: N801  (named as its URL)
    throttle_classes = (DemoThrottle, drf.AnonRateThrottle)

    def get(self, request):  # noqa: ARG002
        return Response({"text": "Here you are."})


api = NinjaAPI(urls_namespace="demo_api", docs_url=None)


@api.get("/search", throttle=[ninja.UserRateThrottle("4/30s")])
def django_ninja(request):  # noqa: ARG001
    return {"text": "Here you are."}
