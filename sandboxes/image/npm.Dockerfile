# Layer with npm programs in /harness, such as agent CLIs: `manage.py build_image --npm PACKAGE --tag IMAGE`, on the sandbox image.
# HOME is in /workspace: files of root in it could not be replaced when a snapshot is restored.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ARG NPM_PACKAGES
USER root
RUN HOME=/root NPM_CONFIG_PREFIX=/harness npm install -g --no-fund --no-audit ${NPM_PACKAGES} \
 && rm -rf /root/.npm /root/.cache /tmp/* \
 && python3 -I /opt/leasehold/contents.py > /opt/leasehold/CONTENTS
USER agent
