# check: test "$(cat /home/sailor/who | tr '\n' ' ')" = 'sailor crew ' && echo mine >> words.txt && ! echo no > of-root
# needs: run root
FROM debian
RUN groupadd -g 4321 crew && useradd -m -u 1234 -g crew sailor
WORKDIR /deck
COPY --chown=sailor:crew words.txt .
RUN echo root > /deck/of-root
USER sailor
RUN id -un > ~/who && id -gn >> ~/who
