# check: grep -qF '$PATH' /made && grep -q bash /shell
# needs: run
FROM debian
RUN ["python3", "-c", "open('/made', 'w').write('$PATH')"]
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN [[ -f /made ]] && echo bash > /shell
