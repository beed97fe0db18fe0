"""Settings of Django and its libraries that do not depend on the environment, imported by settings.py."""

from django.templatetags.static import static
from django.urls import reverse_lazy

from controlplane import env

INSTALLED_APPS = [
    "unfold",
    "unfold.contrib.filters",
    "controlplane.console.sign_in",  # its createsuperuser command has to precede the one of django.contrib.auth
    "django.contrib.admin.apps.SimpleAdminConfig",  # urls.py loads the admin pages: worker and egress server need none
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "controlplane.worker",  # its qcluster command has to precede the one of django_q
    "django_q",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "sandboxes",
    "billing",
    "leases",
    "controlplane",
]
MIDDLEWARE = [
    "controlplane.middleware.ProblemDocumentMiddleware",  # outermost, so that every API error is a problem document
    "controlplane.middleware.PublicAddressMiddleware",
    "controlplane.middleware.TraceContextMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "controlplane.middleware.AdminSessionMiddleware",  # this and the next four skip /api/, which uses keys, not cookies
    "controlplane.middleware.AdminCommonMiddleware",
    "controlplane.middleware.AdminCsrfMiddleware",
    "controlplane.middleware.AdminAuthenticationMiddleware",
    "controlplane.console.sign_in.middleware.SessionLimitMiddleware",
    "controlplane.console.sign_in.proxy.ProxySignInMiddleware",
    "controlplane.console.sign_in.middleware.SignInMiddleware",
    "controlplane.middleware.AnonymousRequestLimitMiddleware",
    "controlplane.middleware.AdminMessageMiddleware",
    "controlplane.middleware.ContentSecurityPolicyMiddleware",
]
ROOT_URLCONF = "controlplane.urls"
WSGI_APPLICATION = "controlplane.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [env.BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
FORMAT_MODULE_PATH = ["controlplane.formats"]
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True  # serves the admin without collectstatic
WHITENOISE_AUTOREFRESH = False
SANDBOX_TOOLS = "controlplane.sandbox_tools"  # module: the egress server knows no leases
LOGIN_REDIRECT_URL = "admin:index"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"  # no cookie of its own
SESSION_COOKIE_HTTPONLY = CSRF_COOKIE_HTTPONLY = True
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = 80 << 20  # each view has a smaller limit of its own, reported with 413
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["leases.api.base.authentication.KeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["leases.api.base.permissions.HasKey"],
    "DEFAULT_PARSER_CLASSES": ["leases.api.base.parsers.JsonParser"],
    "DEFAULT_RENDERER_CLASSES": ["leases.api.base.renderers.JsonRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "leases.api.base.renderers.Negotiation",
    "DEFAULT_SCHEMA_CLASS": "leases.api.base.schema.ApiSchema",
    "EXCEPTION_HANDLER": "controlplane.errors.handle",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Leasehold",
    "VERSION": "1",
    "DESCRIPTION": "API to lease sandboxes to AI agents. Errors are problem documents (RFC 9457).",
    "OAS_VERSION": "3.1.1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SERVE_AUTHENTICATION": [],
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "SORT_OPERATIONS": False,
    "ENUM_NAME_OVERRIDES": {  # enums whose field names occur in several components
        "FileRootEnum": ["workspace", "data"],
        "RunKindEnum": ["exec", "turn", "file", "process"],
        "StateEnum": "sandboxes.models.SandboxState",
        "TemplateStateEnum": ["building", "ready", "failed"],
        "ProcessStateEnum": "sandboxes.models.ProcessStatus",
        "AgentRunStateEnum": "leases.agent_runs.models.AgentRunState",
        "QueuedRunStateEnum": "leases.queue.models.QueuedRunState",
        "PendingStateEnum": ["queued", "started"],
        "QueuedRunKindEnum": ["exec", "agent_run", "turn"],
        "RestartPolicyEnum": "sandboxes.models.RestartPolicy",
        "LeaseStatusEnum": "leases.models.LeaseStatus",
        "CodingTaskStatusEnum": "leases.coding.models.CodingTaskStatus",
        "WaitOutcomeEnum": ["matched", "timed_out", "process_ended"],
        "OutcomeEnum": "sandboxes.models.RunOutcome",
        "CallOutcomeEnum": ["open", "ok", "failed", "cut", "refused", "lost"],
        "OnceOutcomeEnum": ["ok", "failed", "timeout", "oom_killed", "container_failed", "internal"],
    },
    "SWAGGER_UI_DIST": "SIDECAR",  # served locally, not from a CDN
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "validatorUrl": None},  # null: no request to validator.swagger.io
}
OTP_TOTP_ISSUER = "Leasehold"
OTP_TOTP_THROTTLE_FACTOR = OTP_STATIC_THROTTLE_FACTOR = 0  # codes are throttled like passwords, before the device is read
LOGIN_URL = reverse_lazy("admin:login")

UNFOLD = {
    "SITE_TITLE": "Leasehold",
    "SITE_HEADER": "Leasehold",
    "SITE_SUBHEADER": "sandboxes for agents",
    "SITE_SYMBOL": "deployed_code",
    "SITE_URL": None,
    "SHOW_VIEW_ON_SITE": False,
    "SHOW_HISTORY": True,
    "STYLES": [lambda request: static("leasehold/console.css")],
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("leasehold/icon.svg")}],
    "SIDEBAR": {
        "show_search": False,
        "show_all_applications": False,
        "navigation": "controlplane.console.navigation.build_sidebar",
    },
    "TABS": "controlplane.console.navigation.build_tabs",
    "ENVIRONMENT": "controlplane.console.navigation.build_environment_label",
    "DASHBOARD_CALLBACK": "controlplane.console.dashboard.extend_index_context",
}
