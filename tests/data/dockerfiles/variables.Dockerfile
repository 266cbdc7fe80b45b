# check: test "$(show)" = 'one two/three/four five'
# needs: run
FROM debian
ENV A=one
ENV B="$A two" C=${D:-three} PATH=/opt/tools:$PATH
ENV OLD four five
RUN mkdir -p /opt/tools && printf '#!/bin/sh\necho "$B/$C/$OLD"\n' > /opt/tools/show && chmod +x /opt/tools/show
