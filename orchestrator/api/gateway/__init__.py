"""A model behind OpenAI's API, over generate replicas of any platform: token-exact, from zero.

request --forms.py--> tokens --Stream--> gateway.py: calls of many streams --platform--> generate replicas
        <---------- text, tokens, log-probabilities, as calls hand them over
"""
