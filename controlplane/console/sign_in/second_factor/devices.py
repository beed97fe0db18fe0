"""Devices of a user: one authenticator app, and backup codes that work once each."""

from base64 import b32encode
from collections.abc import Sequence
from datetime import datetime

from django.contrib.auth.models import AbstractBaseUser
from django.db import transaction
from django_otp import devices_for_user
from django_otp.models import Device
from django_otp.oath import TOTP
from django_otp.plugins.otp_static.models import StaticDevice, StaticToken
from django_otp.plugins.otp_totp.models import TOTPDevice
from django_otp.util import random_hex

BACKUP_CODES = 10
SECRET_BYTES = 20
TOLERATED_STEPS = 1  # of 30 seconds, before and after the present one


def has_app(user: AbstractBaseUser) -> bool:
    return TOTPDevice.objects.filter(user=user, confirmed=True).exists()


def generate_secret() -> str:
    """Return a new secret in hexadecimal."""
    return str(random_hex(SECRET_BYTES))


def encode_secret(secret: str) -> str:
    """Return the secret as people type it into an app, in base32."""
    return b32encode(bytes.fromhex(secret)).decode()


def build_address(secret: str, user: AbstractBaseUser) -> str:
    """Return the otpauth address of a secret, which an app reads from a QR code."""
    return str(TOTPDevice(key=secret, user=user).config_url)


def verify_code(user: AbstractBaseUser, code: str) -> Device | None:
    """Return the device that accepts this code, None if no device does. A code is accepted once: the devices are locked."""
    with transaction.atomic():
        for device in devices_for_user(user, for_verify=True):
            if device.verify_token(code):
                return device
    return None


def enroll(user: AbstractBaseUser, secret: str, code: str, *, now: datetime) -> tuple[Device, Sequence[str]] | None:
    """Replace the devices of a user by an app with this secret and new backup codes. Return the app's device and the codes.

    Return None, and change nothing, if the code does not prove that the app has the secret."""
    totp = TOTP(bytes.fromhex(secret))
    totp.time = now.timestamp()
    if not code.isdecimal() or not totp.verify(int(code), TOLERATED_STEPS):
        return None
    with transaction.atomic():
        remove_devices(user)
        device = TOTPDevice.objects.create(user=user, name="app", key=secret, drift=totp.drift, last_t=totp.t())
        return device, replace_backup_codes(user)


def replace_backup_codes(user: AbstractBaseUser) -> Sequence[str]:
    """Replace the backup codes of a user by new ones, and return them."""
    with transaction.atomic():
        StaticDevice.objects.filter(user=user).delete()
        device = StaticDevice.objects.create(user=user, name="backup codes")
        codes = [StaticToken.random_token() for _ in range(BACKUP_CODES)]
        StaticToken.objects.bulk_create([StaticToken(device=device, token=code) for code in codes])
    return codes


def remove_devices(user: AbstractBaseUser) -> int:
    """Remove all devices of a user. Return how many apps there were."""
    StaticDevice.objects.filter(user=user).delete()
    return int(TOTPDevice.objects.filter(user=user).delete()[0])
